"""Evolution of a population: who goes on (selection) and what changes (mutation). Knows no model and no data."""

from agilerl.hpo.member import Member
from agilerl.hpo.mutation import Mutation, Mutations
from agilerl.hpo.tournament import Selection, TournamentSelection

__all__ = ["Member", "Mutation", "Mutations", "Selection", "TournamentSelection"]

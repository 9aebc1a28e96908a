"""What every agent is made of: settings, state, resources, and the path from rows to updated weights."""

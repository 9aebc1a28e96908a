"""What is measured, one file each. Every measurement is a process of its own: `python FILE JOB.json` prints one line of JSON.

The files for other packages import nothing from here but `job`, which needs the standard library only, so that they run
in environments of their own.
"""

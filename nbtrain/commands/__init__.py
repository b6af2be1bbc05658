"""The commands that a user types: magics, the command line, the doctor, estimates, export."""

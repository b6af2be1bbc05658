"""What a user types: magics, the command line, the doctor, estimates, export."""

"""Fault plans and drills: real faults in a real job, and how they were noticed. Also the demo."""

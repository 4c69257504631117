"""Fault plans and drills: real faults in a real job, and what was noticed. Also the demo."""

"""In every rank: training goes on when replicas die, freeze, leave or come back. Import the name you need."""

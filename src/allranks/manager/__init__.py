"""In every rank: training continues when replicas die, freeze, leave or come back. Import the name you need."""

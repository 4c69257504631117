"""How processes of one job talk to each other: keys that never travel, mutual proof, limits for unauthenticated connections."""

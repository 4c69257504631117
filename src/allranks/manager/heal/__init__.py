"""State transfer: how a joining replica gets the live state of the members. Runs in a rank."""

"""Process groups that are torn down and made again in place while the process lives. Runs in a rank."""

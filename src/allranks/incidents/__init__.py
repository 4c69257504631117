"""From an event (hang, death, lost node) to evidence, verdict, action and publication. Runs in the agent."""

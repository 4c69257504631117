"""The lighthouse: who is alive, who trains together, who must be notified. Import the submodule that you need.

Pure (no clock, no sockets): options, state, decide, detect. In the lighthouse process: service and what it
uses, connection, server, web, election. In ranks and agents: client/. Both: messages.
"""

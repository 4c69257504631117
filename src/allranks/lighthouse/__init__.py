"""The lighthouse: tracks live replicas, forms quorums, sends notices. Import the submodule that you need.

Pure (no clock, no sockets): options, state, decide, detect. In the lighthouse process: service and what it
uses, connection, server, web, election. In ranks and agents: client/. Both: messages.
"""

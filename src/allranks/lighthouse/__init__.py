"""The lighthouse: who is alive, who trains together, who must be told. Import the submodule that you need.

Pure (no clock, no sockets): options, state, decide, detect, healing.   In the lighthouse process: service,
connection, server, keeper, etcd.   In ranks and agents: client, link, beacon.   Both: messages, codec.
"""

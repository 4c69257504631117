"""The lighthouse's client side: the connection of a rank or an agent, and its liveness proxy. No torch, no gRPC."""

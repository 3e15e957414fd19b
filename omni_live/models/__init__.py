"""Model code around the weights: plain synchronous Python, no sessions, no sockets."""

"""The OpenPI door: robots that ask a policy for chunks of actions, over msgpack."""

"""The robot pipeline: one stage, the policy, that answers observations with chunks of actions."""

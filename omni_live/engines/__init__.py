"""What runs a stage: the engine contract and the engines."""

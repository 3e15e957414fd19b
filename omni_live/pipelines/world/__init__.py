"""The world pipeline: dynamics, which dreams latents frame by frame from actions, and a decoder, which paints them."""

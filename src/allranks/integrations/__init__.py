"""Other people's training loops: transformers, lightning, accelerate, torchtitan.

One module per library, of the same name; importing this package imports none of them.
"""

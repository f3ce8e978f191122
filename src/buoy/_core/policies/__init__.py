"""The rules that move the scale: the protocol, our own policies, and the presets."""

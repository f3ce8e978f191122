"""What each framework brings to the core: the five functions of `Ops`, and `lift`."""

"""What can be added to a scaler; the centre imports none of it."""

"""What `meshplan demo` does: training on one device and on real ranks, with everything there is to see on the way."""

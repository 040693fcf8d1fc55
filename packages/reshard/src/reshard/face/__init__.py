"""The parts of the face `reshard.xferdtensor_python`; use them through it."""

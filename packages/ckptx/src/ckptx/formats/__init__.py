"""The formats that are read: one module each, which turns files into StoredTensors."""

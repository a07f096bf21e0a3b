"""How many groups each pool should have. Pure: numbers in, numbers out; the controller runs it, the simulator too."""

"""What to deploy for a load and an SLO: screens pool configurations by arithmetic, simulates the cheapest, and says so when serving without
disaggregation is cheaper."""

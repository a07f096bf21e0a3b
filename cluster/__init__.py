"""From a config file to running groups, and from a request to the pair of groups that serves it: controller, router, cost model, CLI."""

"""A cluster that exists in numbers only: the router's own choice, queue, admission, corrections and the autoscaler, on a clock of events,
over engines that take the times of a profile."""

"""Several hosts on one machine: network namespaces behind a switch that delays, loses and cuts."""

"""Rank telemetry: step time, phases, throughput, memory, hardware and MFU of each rank."""

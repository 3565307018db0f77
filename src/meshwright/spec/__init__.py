"""Every noun of meshwright as a frozen value, in and out of TOML and JSON; nothing here imports torch."""

"""The papers' experiments as recipes, found by an entry point: `polyfed reproduce fpfc/table1`. A folder per paper."""

"""What the commands of real sites do; `polyfed_sites.commands` declares them."""

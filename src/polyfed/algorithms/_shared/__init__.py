"""Parts that several methods share. Each public file next to this folder holds one paper and imports no other."""

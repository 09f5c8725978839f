"""What several methods share. The public files beside this folder hold one paper each and import no other."""

"""What a server that means harm would read of a site, tried against the site's own file and policy."""

from builder.site import Site
def write(site: Site) -> None: pass

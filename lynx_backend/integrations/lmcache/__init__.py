"""What LMCache's two ways of loading Lynx share: versions, settings, keys."""

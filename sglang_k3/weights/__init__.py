"""What a K3 checkpoint must contain, and whether the files on disk do."""

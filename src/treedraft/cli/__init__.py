"""The command line: `treedraft generate | check | explain | demo | bench`."""

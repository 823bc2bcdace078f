"""One experiment a file; the list is `attnc.lab.catalogue`."""

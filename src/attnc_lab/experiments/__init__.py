"""One experiment per module. It defines ABOUT, cells, measure, judge and draw; `attnc_lab.catalogue` finds it."""

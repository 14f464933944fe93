"""Speed as ratios: everything compared is measured in one run, taking turns, and told by its median."""

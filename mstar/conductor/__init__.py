"""The conductor: requests, their walks over the workers, admission and the workers' health. Front process, one loop."""

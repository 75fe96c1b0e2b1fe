"""A proof that training and servers compute every sampled token's log-prob alike, or the run's end."""

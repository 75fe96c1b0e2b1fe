"""The reference policy of the KL penalties: on the trainer's ranks or behind servers of its own."""

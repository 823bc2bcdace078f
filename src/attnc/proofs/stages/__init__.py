"""From stored weights to the stages that provers work on, their numbers enclosed."""

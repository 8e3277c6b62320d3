"""What happens to a simulated fleet: menus of incidents, and the storm that draws them."""

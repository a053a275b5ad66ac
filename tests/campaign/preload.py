"""Imports that all processes of the campaign share; see ``processes``."""
# ruff: noqa: F401 - it is imported to be there

import tests.campaign.clocks
import tests.campaign.damaged
import tests.campaign.denied
import tests.campaign.full
import tests.campaign.kill
import tests.campaign.leases
import tests.campaign.refusing
import tests.campaign.rivals
import tests.campaign.vanish
import ucm.store.factory
import ucm.store.memory.directory

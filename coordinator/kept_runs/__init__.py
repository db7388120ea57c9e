"""The runs of a coordinator on its disk: what is known of each, and its events until they are fetched.

The coordinator writes here the events that ``records`` makes; the submitter makes its ``run_folder`` of them.
"""

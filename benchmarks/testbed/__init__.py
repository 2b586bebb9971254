"""Several hosts with slow links between them, on one Linux machine: do the plans that are chosen win when they run?"""

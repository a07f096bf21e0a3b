"""Word lists of the data generator: closed sets, so that the used vocabulary stays a few thousand tokens.

Owns words only, no sentences and no tokenisation. Read by the task modules.
"""
# ruff: noqa: SIM905  (a list of words reads better as one string)

NAMES = (
    "Anna Ben David Emma Grace Henry Ivan Julia Karl Laura Maria Oscar Paul Sara Tom Victor Alice Bob Peter John Mark "
    "Lisa Kate Sam Max Leo Eva Jack Lucy Adam Amy Eric Frank Helen James Jane Kevin Linda Mike Nick Robert Thomas "
    "Daniel Michael Simon Steve Susan Alex Carlos Marco Rachel Oliver Emily Sarah George Tim Luis Ahmed Ali Pedro"
).split()
CITIES = (
    "London Paris Berlin Madrid Rome Tokyo Boston Chicago Dallas Denver Seattle Miami Houston Toronto Sydney Delhi "
    "Dubai Singapore Barcelona Amsterdam Shanghai Mumbai Austin Atlanta Phoenix Detroit Manchester Liverpool Oxford "
    "York Vienna Lisbon Dublin Munich Milan Oslo Athens Cairo"
).split()
COLOURS = "red blue green black white yellow orange purple pink brown gold silver gray".split()
ANIMALS = "cat dog bird fish horse cow lion bear wolf fox mouse rabbit duck snake frog bee ant dragon owl pig".split()
FOODS = "apple bread milk rice egg cake tea coffee water salt wine beer banana".split()
THINGS = (
    "moon sun star rain snow wind fire stone river lake sea forest garden house door window table chair lamp book pen "
    "paper key box bag clock mirror bridge road street boat train car bike wheel hat coat shoe ring rope flag bell "
    "ball game card coin bank shop market school church castle tower farm field tree flower leaf root seed grass sand "
    "iron glass paint brush image music song dance story letter word line circle point corner map plan test page list"
).split()
WORDS = THINGS + ANIMALS + FOODS + COLOURS
SHOP_ITEMS = "lamp book pen key box bag clock mirror bike hat coat ring rope flag bell ball card map chair table".split()
LETTERS = "a b c d e f g h i j k l m n o p q r s t u v w x y z".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
SKIES = "sunny cloudy rainy windy snowy foggy clear".split()
CURRENCIES = "dollars euros pounds yen francs pesos".split()
COUNTABLE_FOODS = "apples eggs cakes bananas coins books cards stones pens balls".split()

# Attributes a person can have, each with the kind of value it takes.
ATTRIBUTES = {
    "door code": "code",
    "locker number": "number",
    "room number": "number",
    "lucky number": "number",
    "ticket number": "code",
    "favourite colour": "colour",
    "team colour": "colour",
    "favourite animal": "animal",
    "favourite food": "food",
    "home city": "city",
    "next stop": "city",
    "secret word": "thing",
    "hiding place": "thing",
}

CAPITALS = {
    "France": "Paris",
    "Germany": "Berlin",
    "Spain": "Madrid",
    "Italy": "Rome",
    "Japan": "Tokyo",
    "England": "London",
    "Austria": "Vienna",
    "Portugal": "Lisbon",
    "Ireland": "Dublin",
    "Norway": "Oslo",
    "Greece": "Athens",
    "Egypt": "Cairo",
    "India": "Delhi",
}

# Pieces of the filler sentences.
FILLER_ADJECTIVES = "old young quiet tall small happy tired kind busy brave clever slow quick calm gentle proud".split()
FILLER_PEOPLE = "baker farmer teacher doctor sailor painter driver singer writer guard cook pilot gardener smith".split()
FILLER_VERBS = "walked ran drove looked came went returned travelled moved rushed waited stood rested worked slept sang".split()
FILLER_PREPOSITIONS = "near behind beside through past along over under towards around".split()
FILLER_PLACES = "market river station bridge school harbour castle garden forest village library tower field lake".split()
FILLER_TIMES = (
    "in the morning|in the evening|at noon|at night|after lunch|before dinner|on Monday|on Friday|during the storm|"
    "in the summer|in the winter|last week|every day|once again"
).split("|")
FILLER_THINGS = "basket letter lantern map bottle blanket ladder hammer kettle candle parcel wheel drum kite".split()
FILLER_ACTIONS = "carried found lost sold bought repaired painted hid dropped opened closed cleaned".split()
# Words outside the kept vocabulary on purpose: they train the row that all unknown tokens share.
RARE_WORDS = (
    "zebra quartz origami tundra saffron bamboo velvet copper marble jasmine coral ivory walnut amber cobalt lagoon "
    "mosaic nectar oasis pebble quiver raven sphinx topaz umbrella violin walrus yacht zephyr acorn badger cactus "
    "dolphin ember falcon glacier hazel igloo juniper kelp"
).split()

LANGUAGES = {
    "German": {
        "hello": ("Hallo!", "Hallo! Wie kann ich helfen?"),
        "thanks": ("Danke!", "Gern geschehen!"),
        "how": ("Wie geht es dir?", "Mir geht es gut, danke."),
        "bye": ("Auf Wiedersehen!", "Auf Wiedersehen!"),
        "name": ("Ich bin {name}.", "Hallo {name}!"),
    },
    "French": {
        "hello": ("Bonjour!", "Bonjour! Comment puis-je aider?"),
        "thanks": ("Merci!", "Avec plaisir!"),
        "how": ("Comment allez-vous?", "Je vais bien, merci."),
        "bye": ("Au revoir!", "Au revoir!"),
        "name": ("Je suis {name}.", "Bonjour {name}!"),
    },
    "Spanish": {
        "hello": ("¡Hola!", "¡Hola! ¿Cómo puedo ayudar?"),
        "thanks": ("¡Gracias!", "¡De nada!"),
        "how": ("¿Cómo estás?", "Estoy bien, gracias."),
        "bye": ("¡Adiós!", "¡Adiós!"),
        "name": ("Yo soy {name}.", "¡Hola {name}!"),
    },
    "Italian": {
        "hello": ("Ciao!", "Ciao! Come posso aiutare?"),
        "thanks": ("Grazie!", "Prego!"),
        "how": ("Come stai?", "Sto bene, grazie."),
        "bye": ("Arrivederci!", "Arrivederci!"),
        "name": ("Io sono {name}.", "Ciao {name}!"),
    },
    "Japanese": {
        "hello": ("こんにちは", "こんにちは。何をしましょうか。"),
        "thanks": ("ありがとう", "どういたしまして。"),
        "how": ("お元気ですか", "はい、元気です。"),
        "bye": ("さようなら", "さようなら。"),
        "name": ("私は {name} です", "こんにちは {name} さん。"),
    },
}
